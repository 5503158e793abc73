// Runs of the C++ kernels over awkward shapes, in buffers of just the size that their contracts give, for the
// sanitizers that all this is compiled with (tests/unit/test_kernel_bounds.py). Each returns how many calls it made.
#pragma once

int run_attention();
int run_decoder();
int run_linear();
int run_sampling();
