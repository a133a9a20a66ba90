"""KV cache storage: planes of pages behind one page table."""
