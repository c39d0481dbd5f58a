"""What surrounds training: the command line, planning, diagnosis, comparing and export."""
