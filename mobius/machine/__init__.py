"""What the machine is: devices, how they are attached, which rank gets which, and free memory."""
