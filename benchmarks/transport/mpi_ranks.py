"""What mpirun starts: a rank of MPI that is a rank of torch.distributed too, so that both sides run in the same processes.

python -m mpi4py mpi_ranks.py SETTINGS.json RESULT.json   (under mpirun; bench.py does that. `-m mpi4py` ends all when one fails.)
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import blocks
import mpi4py
from mpi4py import MPI


def main() -> None:
    communicator = MPI.COMM_WORLD
    settings = json.loads(Path(sys.argv[1]).read_text())
    with socket.socket() as probe:  # a free port: rank 0's, and all hear of it
        probe.bind(("127.0.0.1", 0))
        port = communicator.bcast(probe.getsockname()[1])
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=os.environ["OMPI_COMM_WORLD_RANK"],
        WORLD_SIZE=os.environ["OMPI_COMM_WORLD_SIZE"],
        LOCAL_RANK=os.environ["OMPI_COMM_WORLD_LOCAL_RANK"],
        LOCAL_WORLD_SIZE=os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"],
    )
    result = blocks.compare_on_rank(settings, communicator)
    library = MPI.Get_library_version().split(",")[0].rstrip("\0")
    result["mpi"] = f"{library}, mpi4py {mpi4py.__version__}"
    if communicator.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
