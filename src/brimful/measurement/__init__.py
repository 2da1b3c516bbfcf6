"""What a device does, measured: its limits, and the kernels of a step."""
