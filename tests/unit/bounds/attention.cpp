// Calls of paged attention over ragged batches: single tokens of short and long contexts, chunks, sequences of nothing;
// with every type of cache, in pages that are read in place and in pages that are copied together.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "bounds.h"
#include "team.h"

namespace {

struct Sequence {
  int num_query, num_context;
};

struct Shape {
  int num_heads, num_kv_heads, head_dim, block_size, window;
  float softcap;
};

// Everything in memory of just its size; the blocks of the sequences lie in turns.
int run(Team& team, KVType type, const Shape& shape, const std::vector<Sequence>& sequences) {
  int max_blocks = 1, num_tokens = 0;
  std::vector<int32_t> query_start{0}, context_lens;
  for (const Sequence& each : sequences) {
    max_blocks = std::max(max_blocks, (each.num_context + shape.block_size - 1) / shape.block_size);
    num_tokens += each.num_query;
    query_start.push_back(num_tokens);
    context_lens.push_back(each.num_context);
  }
  const int num_seqs = int(sequences.size());
  std::vector<int32_t> tables(size_t(num_seqs * max_blocks));
  for (int sequence = 0; sequence < num_seqs; ++sequence)
    for (int block = 0; block < max_blocks; ++block)
      tables[size_t(sequence * max_blocks + block)] = block * num_seqs + sequence;
  PagedCache cache{nullptr, nullptr, type, shape.num_kv_heads, shape.block_size, shape.head_dim};
  std::vector<char> keys(size_t(cache.page(num_seqs * max_blocks, 0))), values(keys.size());
  cache.keys = keys.data(), cache.values = values.data();
  std::vector<float> vector(size_t(shape.head_dim));
  for (int slot = 0; slot < num_seqs * max_blocks * shape.block_size; ++slot)
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      for (int d = 0; d < shape.head_dim; ++d) vector[size_t(d)] = float((slot * 7 + head * 3 + d * 5) % 11) - 5.0f;
      if (slot % 97 == 96) vector[0] = slot % 2 ? NAN : INFINITY;
      write_kv(cache, slot, head, vector.data(), vector.data());
    }
  const int64_t width = int64_t(shape.num_heads) * shape.head_dim;
  std::vector<float> query(size_t(num_tokens * width), 0.25f), output(query.size());
  const PagedAttention call{query.data(),         width,         cache,      output.data(), query_start.data(),
                            context_lens.data(),  tables.data(), max_blocks, num_seqs,      shape.num_heads,
                            shape.window,         0.1f,          shape.softcap};
  const AttentionItems items = attention_items(call);
  for (int layer = 0; layer < 2; ++layer) paged_attention(team, call, items);
  return 2;
}

}  // namespace

int run_attention() {
  Team team(3, 50, nullptr);
  const std::vector<std::vector<Sequence>> batches = {
      {}, {{1, 1}}, {{1, 300}}, {{0, 5}, {3, 3}, {1, 130}}, {{70, 150}, {1, 17}, {2, 40}, {1, 128}}};
  const Shape shapes[] = {
      {4, 4, 1, 1, 0, 0.0f},   {9, 3, 8, 16, 0, 0.0f},   {7, 1, 33, 5, 20, 0.0f},   {6, 2, 16, 32, 0, 3.0f},
      {2, 2, 10, 16, 7, 5.0f}, {14, 2, 64, 16, 0, 0.0f}, {1, 1, 40, 256, 129, 0.0f}};
  int num_calls = 0;
  for (KVType type : {kFloat32, kFloat16, kInt8})
    for (const Shape& shape : shapes)
      for (const std::vector<Sequence>& batch : batches) num_calls += run(team, type, shape, batch);
  return num_calls;
}
