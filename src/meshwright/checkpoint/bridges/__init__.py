"""Bridges: weights of a model from and to the files of others, one tensor in memory at a time.

A source is opened, its header is read with suspicion, and each tensor is read when its turn to be written has come. What is
written gets its name when it is whole, and never the name of something that exists.

weight_source      what every source answers: names, types, shapes, pieces
own_format         our checkpoints, read and written
safetensors_files  a plain state_dict in one file: read with suspicion, written as a stream
huggingface        directories as transformers reads and writes them
dcp                directories of torch.distributed.checkpoint, read
dcp_metadata       their index and their entries' heads: pickles, read without a class or function of anybody
casting            another type for the entries, with overflow refused
drafts             files and directories that get their name when they are whole
kinds              which kind of thing a path is
converting         the commands `convert` and `export`

To read another kind of file, write a subclass of `weight_source.Weights` and name it in `kinds.py`.
"""

__all__: list[str] = []
