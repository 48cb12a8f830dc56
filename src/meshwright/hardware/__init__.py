"""Devices, links and clusters, and a table of well-known ones in which every number has a source. Free of torch.

cluster  devices, links, clusters
table    the table of known devices, read from `devices.toml`

To add a device: a row in `devices.toml`, with its source.
"""

from meshwright.hardware.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.hardware.table import known_devices, load_cluster

__all__ = ["ClusterSpec", "DeviceSpec", "LinkSpec", "known_devices", "load_cluster"]
