"""The machine: devices and their streams, how they are attached, and free memory."""
