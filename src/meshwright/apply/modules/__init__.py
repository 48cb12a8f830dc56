"""The user's modules: copied, called and hooked without a change to their code.

copies    copies that share tensors and nothing else
forwards  another forward for one module, by a subclass
hooks     hooks that stay behind where a module is copied

To replace a forward: `forwards.py`, never an assignment to the instance.
"""

__all__: list[str] = []
