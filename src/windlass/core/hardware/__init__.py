"""Devices, nodes and links: the catalog, and the HARDWARE argument read and written."""
