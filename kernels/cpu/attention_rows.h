// Computes the rows of one item of attention: its query tokens, for all heads that share a KV head.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attended_keys.h"
#include "attention.h"
#include "attention_products.h"
#include "online_softmax.h"
#include "scratch.h"

inline int to_whole_vectors(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// What is known of an item's rows: the state of each, and its weighted values, [rows, padded_dim], which are still to
// be divided by the total. In one piece of memory.
struct RowSums {
  RowSums() = default;
  RowSums(float* memory, int num_rows)
      : states{memory, memory + to_whole_vectors(num_rows)}, values(memory + 2 * to_whole_vectors(num_rows)) {}

  static size_t size(int num_rows, int padded_dim) {
    return 2 * size_t(to_whole_vectors(num_rows)) + size_t(num_rows) * size_t(padded_dim);
  }
  void clear(int num_rows, int padded_dim) const {
    clear_states(states, num_rows);
    std::fill(values, values + int64_t(num_rows) * padded_dim, 0.0f);
  }

  RowStates states;
  float* values;
};

template <KVType kType>
class AttentionRows {
 public:
  AttentionRows(const PagedAttention& call, const AttentionItem& item)
      : call_(call),
        item_(item),
        keys_(call, item),
        group_(call.num_heads / call.cache.num_kv_heads),
        num_rows_(item.num_rows * group_),
        head_dim_(call.cache.head_dim),
        padded_dim_(to_whole_vectors(head_dim_)),
        vector_bytes_(call.cache.vector_bytes()),
        first_token_(call.query_start[item.sequence] + item.first_row),
        // To copy the values of a single token would take as long as to read them where they lie.
        copies_values_(item.num_rows > 1 || head_dim_ != padded_dim_) {
    Scratch::lay_out([&](Scratch& scratch) {
      const size_t rows = size_t(num_rows_), padded_rows = size_t(to_whole_vectors(num_rows_));
      const size_t part_floats = size_t(kPartKeys) * size_t(vector_bytes_) / sizeof(float);
      const bool needs_spare = !AttendedKeys::has_whole_runs(call.cache);
      query_ = scratch.take(rows * size_t(head_dim_));
      panel_ = scratch.take(size_t(head_dim_) * kPanelKeys);
      scores_ = scratch.take(rows * kPartKeys);
      values_ = scratch.take(copies_values_ ? size_t(kPartKeys) * size_t(padded_dim_) : 0);
      sums_ = RowSums(scratch.take(RowSums::size(num_rows_, padded_dim_)), num_rows_);
      part_states_ = {scratch.take(padded_rows), scratch.take(padded_rows)};
      shrink_ = scratch.take(padded_rows);
      grow_ = scratch.take(padded_rows);
      key_scales_ = scratch.take(kType == kInt8 ? kPartKeys : 0);
      value_scales_ = scratch.take(kType == kInt8 ? kPartKeys : 0);
      spare_keys_ = reinterpret_cast<char*>(scratch.take(needs_spare ? part_floats : 0));
      spare_values_ = reinterpret_cast<char*>(scratch.take(needs_spare ? part_floats : 0));
    });
    const float scale = call.scale * kLog2E;
    for (int row = 0; row < num_rows_; ++row) {
      const float* source = call.query + token(row) * call.query_stride + head(row) * int64_t(head_dim_);
      float* target = query_ + int64_t(row) * head_dim_;
      for (int d = 0; d < head_dim_; ++d) target[d] = source[d] * scale;
    }
    sums_.clear(num_rows_, padded_dim_);
    clear_states(part_states_, num_rows_);
  }

  // All parts that the rows see, into the call's output. `next`: the item after this one, or null.
  void attend(const AttentionItem* next) {
    for (int start = keys_.first_part(); start < keys_.end(); start += kPartKeys) {
      PartVectors ahead;
      if (start + kPartKeys < keys_.end())
        find_ahead(keys_, start + kPartKeys, ahead);
      else
        find_ahead(next, ahead);
      add_part(start, ahead);
    }
    write_output(sums_);
  }

  // The part that begins at `start`, into `sums`, of the size of a RowSums.
  void attend_part(int start, const AttentionItem* next, float* sums) {
    PartVectors ahead;
    find_ahead(next, ahead);
    add_part(start, ahead);
    const float* begin = sums_.states.maxima;
    std::copy(begin, begin + RowSums::size(num_rows_, padded_dim_), sums);
  }

  // The parts from `first_part` on, each in `sums`, one behind the other.
  void merge(float* sums) {
    const size_t size = RowSums::size(num_rows_, padded_dim_);
    for (int start = keys_.first_part(); start < keys_.end(); start += kPartKeys) {
      const RowSums part(sums + size_t(start / kPartKeys) * size, num_rows_);
      fold_states(sums_.states, part.states, num_rows_, shrink_, grow_);
      for (int row = 0; row < num_rows_; ++row)
        for (int64_t d = int64_t(row) * padded_dim_; d < int64_t(row + 1) * padded_dim_; d += kLanes)
          store(sums_.values + d, folded(load(sums_.values + d), load(part.values + d), shrink_[row], grow_[row]));
    }
    write_output(sums_);
  }

 private:
  static constexpr int kLines = kFetchedLines<kType>;
  static constexpr bool kHasScales = kType == kInt8;

  int64_t token(int row) const { return first_token_ + row / group_; }
  int head(int row) const { return item_.kv_head * group_ + row % group_; }

  // The keys of a part that will be read soon.
  void find_ahead(const AttendedKeys& keys, int start, PartVectors& found) const {
    if (AttendedKeys::has_whole_runs(call_.cache)) keys.find(call_.cache.keys, start, nullptr, found);
  }

  // The first ones that the next item reads.
  void find_ahead(const AttentionItem* next, PartVectors& found) const {
    if (!next) return;
    const AttendedKeys keys(call_, *next);
    find_ahead(keys, std::max(keys.first_part(), next->part * kPartKeys), found);
  }

  // What rows of a block see of a part.
  Seen seen_by_rows(int start, int row, int count) const {
    return keys_.seen_by(start, row / group_, (row + count - 1) / group_);
  }

  void add_part(int start, const PartVectors& ahead) {
    PartVectors keys, values;
    keys_.find(call_.cache.keys, start, spare_keys_, keys);
    keys_.find(call_.cache.values, start, spare_values_, values);
    score(start, keys, values);
    if constexpr (kHasScales) {
      read_scales(keys, key_scales_);
      read_scales(values, value_scales_);
    }
    weigh_part(start);
    Fetcher fetcher(ahead.runs + ahead.first, ahead.count(), kRunKeys * vector_bytes_);
    if (!copies_values_) {
      add_values(start, StoredValues<kType>{values.runs, vector_bytes_}, fetcher);
      return;
    }
    const Seen seen = keys_.seen_by_any(start);
    const CopiedValues copied{values_, padded_dim_ * int64_t(sizeof(float))};
    if (copy_values(StoredValues<kType>{values.runs, vector_bytes_}, seen))
      add_values(start, copied, fetcher);
    else
      add_values_row_by_row(start, copied, fetcher);
  }

  void score(int start, const PartVectors& keys, const PartVectors& values) {
    const Seen seen = keys_.seen_by_any(start);
    Fetcher fetcher(values.runs + values.first, values.count(), kRunKeys * vector_bytes_);
    for (int run = keys.first; run < keys.end; run += kPanelKeys / kRunKeys) {
      const int first = run * kRunKeys;
      fill_key_panel<kType>(keys.runs + run, std::min(keys.end - run, kPanelKeys / kRunKeys), vector_bytes_, head_dim_,
                            panel_);
      for_blocks(num_rows_, [&](auto kRows, int row) {
        const Seen by_rows = seen_by_rows(start, row, kRows);
        const int count = std::min({kPanelKeys, by_rows.end - first, seen.end - first});
        if (count > 0 && by_rows.begin < first + kPanelKeys)
          score_rows<kRows, kLines>(query_ + int64_t(row) * head_dim_, panel_, head_dim_, count,
                                    scores_ + row * kPartKeys + first, fetcher);
      });
    }
  }

  void read_scales(const PartVectors& vectors, float* scales) const {
    for (int run = vectors.first; run < vectors.end; ++run)
      for (int key = 0; key < kRunKeys; ++key)
        scales[run * kRunKeys + key] = int8_scale(vectors.runs[run] + key * vector_bytes_, head_dim_);
  }

  void weigh_part(int start) {
    // First all maxima, then all weights: each row is a chain of waits, which only other rows can fill.
    for (int row = 0; row < num_rows_; ++row)
      part_states_.maxima[row] = prepare_scores(scores_ + row * kPartKeys, seen_by_rows(start, row, 1), call_.softcap,
                                                kHasScales ? key_scales_ : nullptr);
    for_blocks(num_rows_, [&](auto kRows, int first) {
      const Seen by_rows = seen_by_rows(start, first, kRows);
      for (int row = first; row < first + kRows; ++row)
        part_states_.totals[row] = weigh(scores_ + row * kPartKeys, seen_by_rows(start, row, 1),
                                         part_states_.maxima[row], kHasScales ? value_scales_ : nullptr, by_rows);
    });
    fold_states(sums_.states, part_states_, num_rows_, shrink_, grow_);
  }

  // Returns whether all numbers are finite.
  bool copy_values(const StoredValues<kType>& values, Seen seen) {
    Vector poison{};
    for (int key = seen.begin; key < seen.end; ++key) {
      const char* vector = values.vector(key);
      float* target = values_ + int64_t(key) * padded_dim_;
      int d = 0;
      for (; d + kLanes <= head_dim_; d += kLanes) store(target + d, load_stored<kType>(vector, d));
      for (; d < head_dim_; ++d) target[d] = stored_number<kType>(vector, d);
      for (; d < padded_dim_; ++d) target[d] = 0.0f;
      if constexpr (kType != kInt8)
        for (d = 0; d < padded_dim_; d += kLanes) poison = fused_multiply_add(load(target + d), Vector{}, poison);
    }
    return sum(poison) == 0.0f;
  }

  template <class Values>
  void add_values(int start, const Values& values, Fetcher& fetcher) {
    for_blocks(num_rows_, [&](auto kRows, int row) {
      const Seen seen = seen_by_rows(start, row, kRows);
      weigh_values<kRows, kLines>(scores_ + row * kPartKeys, values, seen.begin, seen.end,
                                  Fold{shrink_ + row, grow_ + row}, sums_.values + int64_t(row) * padded_dim_,
                                  padded_dim_, fetcher);
    });
  }

  // As `add_values`, where a weight of 0 does not make nothing of every value.
  void add_values_row_by_row(int start, const CopiedValues& values, Fetcher& fetcher) {
    for (int row = 0; row < num_rows_; ++row) {
      const Seen seen = seen_by_rows(start, row, 1);
      weigh_values<1, kLines>(scores_ + row * kPartKeys, values, seen.begin, seen.end, Fold{shrink_ + row, grow_ + row},
                              sums_.values + int64_t(row) * padded_dim_, padded_dim_, fetcher);
    }
  }

  void write_output(const RowSums& sums) const {
    for (int row = 0; row < num_rows_; ++row) {
      float* target = call_.output + (token(row) * call_.num_heads + head(row)) * int64_t(head_dim_);
      const float* source = sums.values + int64_t(row) * padded_dim_;
      const float inverse = 1.0f / sums.states.totals[row];
      for (int d = 0; d < head_dim_; ++d) target[d] = source[d] * inverse;
    }
  }

  const PagedAttention& call_;
  const AttentionItem& item_;
  const AttendedKeys keys_;
  const int group_;
  const int num_rows_;  // row = token * group + head
  const int head_dim_;
  const int padded_dim_;
  const int64_t vector_bytes_;
  const int64_t first_token_;
  const bool copies_values_;
  float* query_;   // [rows, head_dim], times the scale
  float* panel_;   // [head_dim, kPanelKeys]
  float* scores_;  // [rows, kPartKeys], then weights
  float* values_;  // [kPartKeys, padded_dim]
  RowSums sums_;
  RowStates part_states_;
  float* shrink_;  // [rows]
  float* grow_;    // [rows]
  float* key_scales_;    // [kPartKeys]
  float* value_scales_;  // [kPartKeys]
  char* spare_keys_;
  char* spare_values_;
};
