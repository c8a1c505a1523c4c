"""What can be done to a host, and undone: its processes, links, memory and files. Each module stands alone."""
