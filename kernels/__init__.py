"""Attention, norm, rotary and activation operators: plain torch reference, C++ for CPUs, Triton for GPUs."""
