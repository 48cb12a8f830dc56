"""Devices, links and clusters, and a table of well-known ones. Free of torch.

Every number in the table has a source; a device without one is not in it.

cluster     devices, links, clusters
mixed       clusters of several kinds of hosts
efficiency  shares of a device's peaks that steps reach, read from `efficiency.toml`
exchanges   times of collectives and messages that a probe measured
table       the table of known devices, read from `devices.toml`

To add a device, add a row in `devices.toml`, with its source, and one in `efficiency.toml`.
"""

from meshwright.hardware.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.hardware.table import known_devices, load_cluster

__all__ = ["ClusterSpec", "DeviceSpec", "LinkSpec", "known_devices", "load_cluster"]
