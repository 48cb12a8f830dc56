"""Checkpoints: files that are whole or not there, and that any layout reads from any other.

Names, layouts, bytes and files; no engine, no rank and no plan is known here (ADR 0016).

store            a run's directory: saving, committing, finding the newest sound one, deleting
open_checkpoint  one checkpoint, open: checked first, then read in parts
manifest         what a checkpoint holds, as JSON that is read with suspicion
strict_json      JSON of others: no repeated key, no number that is none
tensor_files     files of tensors, in the safetensors format
runs             which entries two parts of a tensor have in common
blocks           digests of files, block by block
step_directories checkpoints in what a person names
listing          the command `inspect`: what a checkpoint holds
verification     the command `verify`: every digest, file by file
bridges/         weights from and to the files of others: the commands `convert` and `export`
durable          writing, syncing and renaming, with errors that name path and bytes

To change what a checkpoint holds, touch `manifest.py` and raise its version.
"""

__all__: list[str] = []
