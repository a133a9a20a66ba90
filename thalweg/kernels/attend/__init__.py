"""Parts that all attention kernels share: arguments, softmax, merging of partial results, references, cases."""
