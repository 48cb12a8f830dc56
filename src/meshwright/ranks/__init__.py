"""Processes that become ranks: started, watched, joined, and never left behind (ADR 0003, 0009).

A launch starts ranks on this host; a joined rank was started by torchrun, srun or Kubernetes. Both end up in a `World`.

launch           launch(fn, num_devices), and the group of ranks behind it
supervisor       processes started and watched until the last has ended
processes        one process: its command, environment and end
spawning         ranks forked from a template, or started as interpreters of their own
fork_server      the template, which has imported torch
worker           the program of a rank
link             a rank's connection to its launching process
channel          messages between a rank and its supervisor
heartbeat        shared records of what each rank is doing
watchdog         the thread of a rank that watches its main thread
signals          SIGINT, SIGTERM and their handlers
reaper           the process that ends ranks whose supervisor has died
pace             the time that steps take, and waits that are longer
waits            waits of launched ranks: told, and ended
blame            choice of the rank at fault
hang_report      stacks of ranks that wait
unfinished       work in threads that is lost with the process
error_transfer   exceptions as JSON and back
joined_failures  failures of ranks that others have started
joined_watch     which of such ranks an exchange lacks
told             what such ranks tell each other
neighbours       ends of such ranks' processes on this host
store_connections  connections to the job's store that give up
calls            calls that all ranks make together, and exceptions in them
world            the world of a rank
agent            the end of ranks whose agent, or whose peers, are gone
listening        the socket of rank 0's store
join             entry into a world: launch, torchrun, srun, Kubernetes
capacity         limits of this host that refuse a launch
environment      variables in which launchers describe a rank
groups           process groups
allocator        freed memory kept by the C library

To add a launcher's environment, touch `environment.py`.
"""

__all__: list[str] = []
