"""Copies, forwards and hooks of the user's modules, without a change to their code.

Every engine swaps forwards and runs copies through this folder, so that modules can be restored, copied and pickled.

copies    copies of modules and arguments that share nothing but tensors
forwards  another forward for one module, by a subclass
modes     training and eval mode of modules whose own `train` does more than set a flag
hooks     hooks that are left behind where a module is copied
compiled  modules that torch.compile has compiled
synced_norms  BatchNorm over the samples of all ranks
transforms  transforms of torch.func around layers, refused by name where a plan cannot do them

To replace a forward, use `forwards.py`, never an assignment to the instance.
"""

__all__: list[str] = []
