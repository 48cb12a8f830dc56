"""Pipeline parallelism: calls of layers, dealt out to stages; each stage runs the user's whole forward, its own part for real."""
