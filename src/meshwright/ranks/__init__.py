"""ranks: processes that become ranks: started, watched, joined, and never left behind (ADR 0003, 0009).

launch           launch(fn, num_devices), and the group of ranks behind it
supervisor       processes started and watched until the last has ended
processes        one process: its command, environment and end
spawning         ranks forked from a template, or started anew
fork_server      the template, which has imported torch
worker           what runs in a rank
link             a rank's connection to its launching process
channel          messages between a rank and its supervisor
heartbeat        signs of life
watchdog         the thread of a rank that watches itself and its parent
signals          SIGINT, SIGTERM and their handlers
reaper           the process that ends ranks whose supervisor has died
blame            which rank is at fault
hang_report      stacks of ranks that wait
error_transfer   exceptions as JSON and back
joined_failures  failures of ranks that others have started
calls            calls that all ranks make together, and who raised in one
world            the world that a rank lives in
join             joining one: launch, torchrun, srun, Kubernetes
environment      variables by which launchers say who a rank is
groups           process groups
allocator        freed memory kept by the C library

To add a launcher's environment: `environment.py`.
"""

__all__: list[str] = []
