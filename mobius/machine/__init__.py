"""The machine: devices, how they are attached, which rank gets which, and free memory."""
