// The inverse of a cumulative distribution, given by weights, in two passes: over sums of parts, and within one part.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

// Of the weights that are at least `least`.
inline double sum_of(const float* weights, int64_t count, float least = 0) {
  double sums[4] = {};  // four of them, since an addition that waits for the one before it is slow
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (int j = 0; j < 4; ++j) sums[j] += weights[i + j] >= least ? weights[i + j] : 0;
  for (; i < count; ++i) sums[0] += weights[i] >= least ? weights[i] : 0;
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

struct Place {
  int64_t part;  // -1 where nothing has weight
  double before;  // sum of the parts before it
  double target;
};

// The first part whose end exceeds the share `number` of the whole. sum(part) is what it weighs.
template <class Sum>
Place part_at(double number, int64_t num_parts, const Sum& sum) {
  double total = 0;
  for (int64_t part = 0; part < num_parts; ++part) total += sum(part);
  if (!(total > 0)) return {-1, 0, 0};
  // Below the total also when the product is rounded up, so that a part with weight is always found.
  Place found{0, 0, std::min(number * total, std::nextafter(total, 0.0))};
  while (found.before + sum(found.part) <= found.target) found.before += sum(found.part++);
  return found;
}

// The first of the weights of this part whose end exceeds the target. The sum of the part may have been rounded up, so
// that none does: then the last that weighs anything.
inline int64_t index_at(const Place& place, const float* weights, int64_t count) {
  int64_t last = 0;
  double end = place.before;
  for (int64_t i = 0; i < count && end <= place.target; ++i) {
    if (weights[i] > 0) last = i;
    end += weights[i];
  }
  return last;
}
