"""Planes of bytes behind one page table."""
