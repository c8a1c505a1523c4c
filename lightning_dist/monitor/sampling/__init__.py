"""Where values of metrics come from: the kernel's counters and NVML, one source a file, read by one thread."""
