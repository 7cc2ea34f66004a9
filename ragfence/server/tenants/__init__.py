"""Whole tenants: which there are (`listing`), a copy of one (`exporting`), and its end (`dropping`)."""
