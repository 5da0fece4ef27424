"""The machine: devices, streams, links between devices, disks, and free memory."""
