"""Tools for those who write the course: what is generated, and whether it is current."""
