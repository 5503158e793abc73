// Which keys the rows of an item of attention see, and where they lie.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "attention_products.h"
#include "online_softmax.h"

// Where the stored vectors of a part lie, in runs of kRunKeys: those of the runs [first, end).
struct PartVectors {
  const char* runs[kPartKeys / kRunKeys];
  int first = 0, end = 0;

  int count() const { return end - first; }
};

class AttendedKeys {
 public:
  AttendedKeys(const PagedAttention& call, const AttentionItem& item)
      : call_(call),
        item_(item),
        first_position_(call.context_lens[item.sequence] -
                        (call.query_start[item.sequence + 1] - call.query_start[item.sequence]) + item.first_row),
        num_visible_(first_position_ + item.num_rows) {}

  // Where the parts begin of which any token of the item sees a key: from `first_part`, below `end`.
  int first_part() const { return first_visible(first_position_) / kPartKeys * kPartKeys; }
  int end() const { return num_visible_; }

  // What the item's tokens [first, last] see of the part that begins at position `start`.
  Seen seen_by(int start, int first, int last) const {
    return {std::max(0, first_visible(first_position_ + first) - start),
            std::min(kPartKeys, first_position_ + last + 1 - start)};
  }
  Seen seen_by_any(int start) const { return seen_by(start, 0, item_.num_rows - 1); }

  // Blocks that are not made of whole runs are copied together: `spare` has room for kPartKeys vectors.
  void find(const void* pages, int start, char* spare, PartVectors& found) const {
    const PagedCache& cache = call_.cache;
    const Seen seen = seen_by_any(start);
    found.first = seen.begin / kRunKeys, found.end = (seen.end + kRunKeys - 1) / kRunKeys;
    if (has_whole_runs(cache)) {
      for (int run = found.first; run < found.end; ++run) found.runs[run] = vector(pages, start + run * kRunKeys);
      return;
    }
    const int64_t bytes = cache.vector_bytes();
    for (int key = seen.begin; key < seen.end; ++key)
      std::memcpy(spare + key * bytes, vector(pages, start + key), size_t(bytes));
    for (int run = found.first; run < found.end; ++run) found.runs[run] = spare + run * kRunKeys * bytes;
  }

  static bool has_whole_runs(const PagedCache& cache) { return cache.block_size % kRunKeys == 0; }

 private:
  const char* vector(const void* pages, int position) const {
    const PagedCache& cache = call_.cache;
    const int64_t block = call_.block_tables[item_.sequence * call_.max_blocks + position / cache.block_size];
    return static_cast<const char*>(pages) + cache.page(block, item_.kv_head) +
           position % cache.block_size * cache.vector_bytes();
  }

  // Of the keys that the token at `position` sees, the first one.
  int first_visible(int position) const { return call_.window ? std::max(0, position + 1 - call_.window) : 0; }

  const PagedAttention& call_;
  const AttentionItem& item_;
  const int first_position_;
  const int num_visible_;  // by the last token
};
