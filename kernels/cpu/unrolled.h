// Loops over constants, unrolled early enough for compilers to keep arrays of sums in registers: those with a pragma
// are unrolled too late.
#pragma once

#include <type_traits>

#define HEADRACE_INLINE inline __attribute__((always_inline))
#define HEADRACE_INLINE_BODY __attribute__((always_inline))

// body(0), ... body(kCount - 1) with constant arguments.
template <int kCount, class Body>
HEADRACE_INLINE void unrolled(const Body& body) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(body);
    body(std::integral_constant<int, kCount - 1>{});
  }
}
