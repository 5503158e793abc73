// Paged attention for any mix of prompt chunks and single tokens, in one call for the whole batch.
//
// The work is cut into items of (sequence, KV head, tile of query tokens). All query heads that share a
// KV head are rows of one item, so keys and values are read once per KV head (GQA packing). Threads
// take items from a common queue. Items with one query token go through `attend_token`, which streams
// the pages as they lie; wider ones through `attend_tile`, which copies 64 keys at a time, transposed,
// and reuses them for all rows (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867).
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "team.h"
#include "vector.h"

namespace {

constexpr int kTileKeys = 64;
constexpr int kTileRows = 96;  // query rows (tokens x heads of a group) that share a copied tile of keys

using Item = AttentionItem;

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Grows and never shrinks; one per thread, so that no call allocates once the sizes have settled.
float* scratch(size_t num_floats) {
  static thread_local std::vector<float> buffer;
  if (buffer.size() < num_floats) buffer.resize(num_floats);
  return buffer.data();
}

// The page that holds position `position`: `block_size` vectors of head_dim floats.
const float* page(const void* values, const PagedAttention& call, const Item& item, int position) {
  const int64_t block = call.block_tables[item.sequence * call.max_blocks + position / call.cache.block_size];
  return static_cast<const float*>(values) + call.cache.page(block, item.kv_head);
}

float dot(const float* a, const float* b, int length) {
  Vector total{};
  int i = 0;
  for (; i + kLanes <= length; i += kLanes) total += load(a + i) * load(b + i);
  float result = sum(total);
  for (; i < length; ++i) result += a[i] * b[i];
  return result;
}

void add_scaled(float* target, float factor, const float* source, int length) {
  int i = 0;
  for (; i + kLanes <= length; i += kLanes) store(target + i, load(target + i) + factor * load(source + i));
  for (; i < length; ++i) target[i] += factor * source[i];
}

// Replaces scores by exp(score - maximum); returns their sum. `padded` is a multiple of kLanes; what
// lies between count and padded becomes 0.
float softmax_numerators(float* scores, int count, int padded, float maximum) {
  for (int i = count; i < padded; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  Vector total{};
  for (int i = 0; i < padded; i += kLanes) {
    const Vector value = exponential(load(scores + i) - maximum);
    store(scores + i, value);
    total += value;
  }
  return sum(total);
}

float maximum_of(const float* scores, int count) {
  float best = -std::numeric_limits<float>::infinity();
  int i = 0;
  if (count >= kLanes) {
    Vector running = load(scores);
    for (i = kLanes; i + kLanes <= count; i += kLanes) running = larger(running, load(scores + i));
    best = largest(running);
  }
  for (; i < count; ++i) best = std::max(best, scores[i]);
  return best;
}

// First key that the token at `position` sees.
int first_visible(const PagedAttention& call, int position) {
  return call.window ? std::max(0, position + 1 - call.window) : 0;
}

void cap_scores(const PagedAttention& call, float* scores, int count) {
  if (call.softcap == 0.0f) return;
  int i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store(scores + i, call.softcap * hyperbolic_tangent(load(scores + i) / call.softcap));
  for (; i < count; ++i) scores[i] = call.softcap * std::tanh(scores[i] / call.softcap);
}

void attend_token(const PagedAttention& call, const Item& item) {
  const int group = call.num_heads / call.cache.num_kv_heads;
  const int head_dim = call.cache.head_dim;
  const int context = call.context_lens[item.sequence];
  const int visible = context - (call.query_start[item.sequence + 1] - call.query_start[item.sequence]) +
                      item.first_row + 1;
  const int first = first_visible(call, visible - 1);
  const int num_keys = visible - first;
  const int padded = round_up(num_keys, kLanes);
  float* scores = scratch(size_t(group) * padded);
  const int64_t token = call.query_start[item.sequence] + item.first_row;
  const float* query = call.query + token * call.query_stride + item.kv_head * group * head_dim;
  float* output = call.output + (token * call.num_heads + item.kv_head * group) * head_dim;

  // Page by page; the window may begin and the context end inside of one.
  const int first_page = first / call.cache.block_size * call.cache.block_size;
  for (int start = first_page; start < visible; start += call.cache.block_size) {
    const float* keys = page(call.cache.keys, call, item, start);
    const int end = std::min(start + call.cache.block_size, visible);
    for (int key = std::max(start, first); key < end; ++key)
      for (int row = 0; row < group; ++row)
        scores[row * padded + key - first] =
            call.scale * dot(query + row * head_dim, keys + (key - start) * head_dim, head_dim);
  }
  for (int row = 0; row < group; ++row) {
    float* of_row = scores + row * padded;
    cap_scores(call, of_row, num_keys);
    const float total = softmax_numerators(of_row, num_keys, padded, maximum_of(of_row, num_keys));
    for (int i = 0; i < num_keys; ++i) of_row[i] /= total;
  }
  std::fill(output, output + group * head_dim, 0.0f);
  for (int start = first_page; start < visible; start += call.cache.block_size) {
    const float* values = page(call.cache.values, call, item, start);
    const int end = std::min(start + call.cache.block_size, visible);
    for (int key = std::max(start, first); key < end; ++key)
      for (int row = 0; row < group; ++row)
        add_scaled(output + row * head_dim, scores[row * padded + key - first], values + (key - start) * head_dim,
                   head_dim);
  }
}

// c[R x n] += a[R x k] * b[k x n], row-major; n is a multiple of kLanes.
template <int R>
void multiply_rows(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int n, int k) {
  int column = 0;
  for (; column + 2 * kLanes <= n; column += 2 * kLanes) {
    Vector left[R], right[R];
    for (int r = 0; r < R; ++r) {
      left[r] = load(c + r * ldc + column);
      right[r] = load(c + r * ldc + column + kLanes);
    }
    for (int i = 0; i < k; ++i) {
      const Vector b_left = load(b + i * ldb + column);
      const Vector b_right = load(b + i * ldb + column + kLanes);
      for (int r = 0; r < R; ++r) {
        left[r] += a[r * lda + i] * b_left;
        right[r] += a[r * lda + i] * b_right;
      }
    }
    for (int r = 0; r < R; ++r) {
      store(c + r * ldc + column, left[r]);
      store(c + r * ldc + column + kLanes, right[r]);
    }
  }
  for (; column < n; column += kLanes) {
    Vector total[R];
    for (int r = 0; r < R; ++r) total[r] = load(c + r * ldc + column);
    for (int i = 0; i < k; ++i)
      for (int r = 0; r < R; ++r) total[r] += a[r * lda + i] * load(b + i * ldb + column);
    for (int r = 0; r < R; ++r) store(c + r * ldc + column, total[r]);
  }
}

void multiply(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int n, int k) {
  int row = 0;
  for (; row + 4 <= m; row += 4) multiply_rows<4>(a + row * lda, lda, b, ldb, c + row * ldc, ldc, n, k);
  for (; row < m; ++row) multiply_rows<1>(a + row * lda, lda, b, ldb, c + row * ldc, ldc, n, k);
}

// Keys [start, start + count) as [head_dim, kTileKeys], values as [kTileKeys, padded_dim].
void copy_tile(const PagedAttention& call, const Item& item, int start, int count, float* keys, float* values,
               int padded_dim) {
  const int head_dim = call.cache.head_dim;
  for (int i = 0; i < count; ++i) {
    const int offset = (start + i) % call.cache.block_size * head_dim;
    const float* key = page(call.cache.keys, call, item, start + i) + offset;
    const float* value = page(call.cache.values, call, item, start + i) + offset;
    for (int d = 0; d < head_dim; ++d) keys[d * kTileKeys + i] = key[d];
    std::copy(value, value + head_dim, values + i * padded_dim);
  }
}

void attend_tile(const PagedAttention& call, const Item& item) {
  const int group = call.num_heads / call.cache.num_kv_heads;
  const int head_dim = call.cache.head_dim;
  const int padded_dim = round_up(head_dim, kLanes);
  const int num_rows = item.num_rows * group;  // row = token * group + head
  const int64_t first_token = call.query_start[item.sequence] + item.first_row;
  const int first_position = call.context_lens[item.sequence] -
                             (call.query_start[item.sequence + 1] - call.query_start[item.sequence]) +
                             item.first_row;
  const int visible = first_position + item.num_rows;  // by the last token of the tile

  float* query = scratch(size_t(num_rows) * (2 * padded_dim + kTileKeys + 2) + 2 * kTileKeys * padded_dim);
  float* output = query + num_rows * padded_dim;
  float* scores = output + num_rows * padded_dim;
  float* maxima = scores + num_rows * kTileKeys;
  float* totals = maxima + num_rows;
  float* keys = totals + num_rows;
  float* values = keys + kTileKeys * padded_dim;
  std::fill(output, output + num_rows * padded_dim, 0.0f);
  std::fill(maxima, maxima + num_rows, -std::numeric_limits<float>::infinity());
  std::fill(totals, totals + num_rows, 0.0f);
  std::fill(keys, values + kTileKeys * padded_dim, 0.0f);
  for (int row = 0; row < num_rows; ++row) {
    const float* source = call.query + (first_token + row / group) * call.query_stride +
                          (item.kv_head * group + row % group) * head_dim;
    for (int d = 0; d < head_dim; ++d) query[row * padded_dim + d] = source[d] * call.scale;
  }

  // From the first key that the tile's first token sees: no token of the tile sees an earlier one.
  for (int start = first_visible(call, first_position); start < visible; start += kTileKeys) {
    const int count = std::min(kTileKeys, visible - start);
    copy_tile(call, item, start, count, keys, values, padded_dim);
    std::fill(scores, scores + num_rows * kTileKeys, 0.0f);
    multiply(query, padded_dim, keys, kTileKeys, scores, kTileKeys, num_rows, kTileKeys, head_dim);
    for (int row = 0; row < num_rows; ++row) {
      float* of_row = scores + row * kTileKeys;
      const int position = first_position + row / group;
      const int unmasked = std::min(count, position + 1 - start);
      const int masked = std::max(0, first_visible(call, position) - start);  // before the window
      if (unmasked <= masked) {  // this token sees none of these keys
        std::fill(of_row, of_row + kTileKeys, 0.0f);
        continue;
      }
      cap_scores(call, of_row, unmasked);
      std::fill(of_row, of_row + masked, -std::numeric_limits<float>::infinity());
      const float maximum = std::max(maxima[row], maximum_of(of_row, unmasked));
      const float shrink = std::exp(maxima[row] - maximum);  // 0 for the first tile
      totals[row] = totals[row] * shrink + softmax_numerators(of_row, unmasked, kTileKeys, maximum);
      maxima[row] = maximum;
      if (shrink != 1.0f)
        for (int d = 0; d < padded_dim; ++d) output[row * padded_dim + d] *= shrink;
    }
    multiply(scores, kTileKeys, values, padded_dim, output, padded_dim, num_rows, padded_dim, count);
  }
  for (int row = 0; row < num_rows; ++row) {
    float* target = call.output +
                    ((first_token + row / group) * call.num_heads + item.kv_head * group + row % group) * head_dim;
    for (int d = 0; d < head_dim; ++d) target[d] = output[row * padded_dim + d] / totals[row];
  }
}

}  // namespace

std::vector<AttentionItem> attention_items(const PagedAttention& call) {
  const int tile_tokens = std::max(1, kTileRows / (call.num_heads / call.cache.num_kv_heads));
  std::vector<Item> items;
  for (int sequence = 0; sequence < call.num_seqs; ++sequence) {
    const int num_tokens = call.query_start[sequence + 1] - call.query_start[sequence];
    // Last tiles first: they see the most keys, and long items at the end would leave threads idle.
    const int num_tiles = (num_tokens + tile_tokens - 1) / tile_tokens;
    for (int tile = num_tiles - 1; tile >= 0; --tile) {
      const int first = tile * tile_tokens;
      for (int head = 0; head < call.cache.num_kv_heads; ++head)
        items.push_back({sequence, head, first, std::min(tile_tokens, num_tokens - first)});
    }
  }
  return items;
}

void paged_attention(Team& team, const PagedAttention& call, const std::vector<AttentionItem>& items) {
  team.each(int64_t(items.size()), 1, [&](Range range) {
    for (int64_t index = range.first; index < range.end; ++index) {
      const Item& item = items[size_t(index)];
      if (item.num_rows == 1)
        attend_token(call, item);
      else
        attend_tile(call, item);
    }
  });
}
