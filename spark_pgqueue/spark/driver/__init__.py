"""What both sources do in their driver-side process."""
