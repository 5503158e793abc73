// Paged attention for any mix of prompt chunks and single tokens, in one call for the whole batch.
//
// The work is cut into items of (sequence, KV head, tile of query tokens). All query heads that share a KV head are
// rows of one item, so keys and values are read once per KV head (GQA packing). Threads take items from a common queue.
//
// The keys of a context are cut into parts of kPartKeys, by position. Of each part a row gets its own maximum, sum of
// weights and weighted values, and these are put together part after part. Where a step has few items, the parts of a
// single token's context are items of their own, and whoever computes the last one puts them together, in the same
// order. So a row's result is the same bit for bit however the work was cut: alone or in a batch, on one thread or
// many, its prompt in one chunk or several.
#include "attention.h"

#include <algorithm>

#include "attention_rows.h"
#include "team.h"

namespace {

// Query rows that share a turned panel of keys: many, since it takes time to make, but not so many that a prompt gives
// fewer than kMinTiles items.
constexpr int64_t kMinTileRows = 24, kMaxTileRows = 192, kMinTiles = 16;

// A context that is more than such a part of all work is split, so that no thread waits for its end.
constexpr int64_t kLargestShare = 32;

// Few enough that several items lie one behind the other, since the next one's keys are asked for in time; enough that
// no thread waits long for the last.
constexpr int64_t kChunksPerThread = 12;

int divide_up(int a, int b) { return (a + b - 1) / b; }

// In vectors of keys.
int64_t cost(const PagedAttention& call, const AttentionItem& item) {
  const int num_tokens = call.query_start[item.sequence + 1] - call.query_start[item.sequence];
  const int end = call.context_lens[item.sequence] - num_tokens + item.first_row + item.num_rows;
  return int64_t(item.num_rows) * end;
}

void split_long_contexts(const PagedAttention& call, AttentionItems& result) {
  int64_t total = 0;
  for (const AttentionItem& item : result.items) total += cost(call, item);
  const int group = call.num_heads / call.cache.num_kv_heads;
  const size_t floats = RowSums::size(group, to_whole_vectors(call.cache.head_dim));
  std::vector<AttentionItem> items;
  size_t num_floats = 0;
  for (AttentionItem item : result.items) {
    const int num_parts = divide_up(call.context_lens[item.sequence], kPartKeys);
    if (item.num_rows > 1 || num_parts == 1 || cost(call, item) * kLargestShare <= total) {
      items.push_back(item);
      continue;
    }
    item.split = int(result.splits.size());
    result.splits.push_back({num_parts, num_floats});
    num_floats += size_t(num_parts) * floats;
    for (item.part = 0; item.part < num_parts; ++item.part) items.push_back(item);
  }
  result.items = std::move(items);
  if (result.splits.empty()) return;
  result.sums.reset(new float[num_floats]);
  result.num_left.reset(new std::atomic<int>[result.splits.size()]);
  for (size_t i = 0; i < result.splits.size(); ++i) result.num_left[i] = result.splits[i].num_parts;
}

template <KVType kType>
void attend(const PagedAttention& call, const AttentionItems& items, const AttentionItem& item,
            const AttentionItem* next) {
  if (item.split < 0) {
    AttentionRows<kType>(call, item).attend(next);
    return;
  }
  const AttentionSplit& split = items.splits[size_t(item.split)];
  const size_t size = RowSums::size(call.num_heads / call.cache.num_kv_heads, to_whole_vectors(call.cache.head_dim));
  float* sums = items.sums.get() + split.first_float;
  if ((item.part + 1) * kPartKeys > AttendedKeys(call, item).first_part())
    AttentionRows<kType>(call, item).attend_part(item.part * kPartKeys, next, sums + size_t(item.part) * size);
  std::atomic<int>& num_left = items.num_left[size_t(item.split)];
  if (num_left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  num_left.store(split.num_parts, std::memory_order_relaxed);  // for the next layer
  AttentionRows<kType>(call, item).merge(sums);
}

}  // namespace

AttentionItems attention_items(const PagedAttention& call) {
  const int64_t num_rows = int64_t(call.query_start[call.num_seqs]) * call.num_heads;
  const int64_t tile_rows = std::clamp(num_rows / kMinTiles, kMinTileRows, kMaxTileRows);
  const int tile_tokens = std::max(1, int(tile_rows) * call.cache.num_kv_heads / call.num_heads);
  AttentionItems result;
  for (int sequence = 0; sequence < call.num_seqs; ++sequence) {
    const int num_tokens = call.query_start[sequence + 1] - call.query_start[sequence];
    for (int first = 0; first < num_tokens; first += tile_tokens)
      for (int head = 0; head < call.cache.num_kv_heads; ++head)
        result.items.push_back({sequence, head, first, std::min(tile_tokens, num_tokens - first), -1, 0});
  }
  split_long_contexts(call, result);
  // Long ones first: at the end they would leave threads idle.
  std::stable_sort(result.items.begin(), result.items.end(), [&](const AttentionItem& a, const AttentionItem& b) {
    return cost(call, a) > cost(call, b);
  });
  return result;
}

void paged_attention(Team& team, const PagedAttention& call, const AttentionItems& items) {
  const int64_t num_items = int64_t(items.items.size());
  const int64_t chunk = std::max<int64_t>(1, num_items / (kChunksPerThread * team.num_threads()));
  team.each(num_items, chunk, [&](Range range) {
    for (int64_t index = range.first; index < range.end; ++index) {
      const AttentionItem& item = items.items[size_t(index)];
      const AttentionItem* next = index + 1 < range.end ? &items.items[size_t(index + 1)] : nullptr;
      switch (call.cache.type) {
        case kFloat32: attend<kFloat32>(call, items, item, next); break;
        case kFloat16: attend<kFloat16>(call, items, item, next); break;
        case kInt8: attend<kInt8>(call, items, item, next); break;
      }
    }
  });
}
