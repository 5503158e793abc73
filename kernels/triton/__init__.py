"""Operators in Triton for GPUs. Import of triton is slow: only `kernels.dispatch` imports these modules."""
