"""DeepSpeed configurations as plans: every key is honoured, or refused with a fix; none is dropped in silence.

The reader flattens a file into dotted keys, and each part takes the keys that it decides.

reader       the whole of it: text to plan, changes of the configuration, a row for each key
text         JSON with comments and trailing commas
keys         the table of keys
check        dotted keys and their types
draft        plan and settings under construction
parallelism  tensor, sequence and pipeline degrees
batch        batch sizes and accumulation
zero         ZeRO and offload
training     optimizer, scheduler, precision, loop

To honour a key, touch its row in `keys.py`, and the part that takes it.
"""

__all__: list[str] = []
