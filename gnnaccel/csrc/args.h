// Arguments of every kernel: plain pointers and sizes, no ownership.
//
// A "grouping" is a CSR structure: `ptr[rows + 1]` delimits the entries of each
// row; entry e reads row `col[e]` of the input (col == nullptr: row e itself) and
// stands at position `perm[e]` of the caller's edge order (perm == nullptr: at e).
#pragma once
#include <cstdint>

namespace gnnaccel {

enum class Dtype : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };

struct Grouping {
  const void* ptr;
  const void* col;
  const void* perm;
  int64_t rows;
  int64_t entries;
  int64_t max_degree;
  bool wide;  // int64 indices; else int32
};

// out[i] = self[i] * x[i] + dst_scale[i] * sum_e w[e] * src_scale[col[e]] * x[col[e]]
//          + base_scale * base[i]
// All columns are [heads * features]; weights are [entries] or [entries, heads].
struct SumArgs {
  Grouping g;
  const void* x;
  int64_t x_stride;  // elements between rows of x; 0 for an expanded row
  void* out;         // contiguous [rows, heads * features]
  int64_t heads, features;
  const void* w;     // same dtype as x, caller's edge order, or nullptr
  int64_t w_stride;  // heads, or 1 when shared by all heads
  const void* src_scale;  // accumulator dtype, or nullptr
  const void* dst_scale;
  const void* self;
  int64_t self_stride;  // 0: one value for all rows
  const void* base;     // like out, and may be out; or nullptr
  double base_scale;
};

// out = (the sum) map + (own rows of x) root + bias, or that added to out, and what the
// gradients of the two matrices are where the sum is of gradients and y the maps' input: g_map = (the sum)^T y,
// g_root = (own rows of x)^T y. float32 by int32 indices; features and columns are
// multiples of 16, and of features at most 256.
struct LinearArgs {
  SumArgs sum;        // one head; its `out` is [rows, features], or nullptr: not wanted
  int64_t columns;
  const float* map;   // [features, columns]
  const float* root;  // the same, with rows that are columns of the graph; or nullptr
  const float* bias;  // [columns] or nullptr
  float* out;         // [rows, columns] or nullptr
  bool adds;          // to what out holds; no bias then
  const float* y;     // [rows, columns], with a gradient that is wanted
  int64_t y_stride;
  float *g_map, *g_root;  // [features, columns] or nullptr
};

// out[i] = max (or min) over e of w[e] * x[col[e]]; empty rows give 0.
// ties (optional, accumulator dtype): how many entries attain it, plus one where the
// result is exactly 0, which is how torch's scatter_reduce splits gradients; NaN where
// the result is NaN.
struct ExtremeArgs {
  Grouping g;
  const void* x;
  int64_t x_stride;
  void* out;
  void* ties;
  int64_t features;
  const void* w;  // [entries] or nullptr
  bool is_max;
};

// Gradient of ExtremeArgs, read along the transposed grouping (rows = sources):
// gx[j] = sum_e w[e] * [w[e] * x[j] is the extreme of row col[e]] * coef[col[e]]
// and its adjoint, read along the forward grouping:
// gv[i] = sum_e w[e] * [w[e] * x[col[e]] is the extreme of row i] * v[col[e]].
struct SelectArgs {
  Grouping g;
  const void* x;  // node features; `rows` side if transposed, else `col` side
  int64_t x_stride;
  const void* best;  // extremes, contiguous; `col` side if transposed, else rows
  const void* v;     // accumulator dtype, contiguous; what is summed, `col` side
  void* out;
  int64_t features;
  const void* w;
  bool is_max;
  bool transposed;
};

// out[perm[e], h] = sum_f a[i, h, f] * b[col[e], h, f] for every entry e of row i.
struct DotArgs {
  Grouping g;
  const void* a;
  int64_t a_stride;
  const void* b;
  int64_t b_stride;
  void* out;
  int64_t heads, features;
};

// Softmax over the entries of each row; z, grad, out are [entries, heads] in the
// caller's order. Backward: out = s * (grad - sum over the row of s * grad).
struct SoftmaxArgs {
  Grouping g;
  const void* z;     // logits, or the softmax itself in the backward pass
  const void* grad;  // nullptr: forward
  void* out;
  int64_t heads;
  double epsilon;  // added to the denominator
};

// Attention and its gradients: see kernels/attention.py for what is computed. Only f32
// and f64; all contiguous. What stands per entry is in the caller's order, but for
// `shares` and `pair`, which are in grouped order.
struct AttentionArgs {
  Grouping g;           // by destination
  Grouping transposed;  // by source; backward only
  const void* positions;  // where in g each entry of `transposed` stands
  int score;            // 0 sum, 1 mlp, 2 dot
  int64_t heads, features;
  const void *query, *key, *value, *att, *edge, *bias, *keep;
  double slope, scale, epsilon;
  void* out;     // [rows, heads * features]; read in the backward pass, as are shares
  void* shares;  // [entries, heads] or nullptr; not under sum
  const void* grad;  // [rows, heads * features]
  void* pair;    // scratch, [entries, 2 * heads]; under sum [rows, 4 * heads]
  void *g_query, *g_key, *g_value, *g_att, *g_edge, *g_bias;
  const void* map;  // [depth, heads * features] or nullptr; with it, edges and their
                    // gradient are [entries, depth]
  int64_t depth;
  void* g_map;
  // Under sum, what the gradients want: [rows, heads * features], the part of `out` whose
  // leaky ReLU was on the positive side, and [rows, 3 * heads]: the largest logit, 1 / the
  // sum of exponentials, the sum of the shares (before keep) on the positive side.
  void *positive, *stats;
};

// out[m][n, h] = <x[n, h], att[m][h]> for one vector per head, or two (att[1] or nullptr).
// With g_x its gradients instead, given those of `out`: g_x has them added, g_att is
// written. All contiguous, f32 and f64.
struct HeadDotArgs {
  int64_t rows, heads, features;
  const void* x;  // [rows, heads * features]
  const void* att[2];
  void* out[2];  // [rows, heads]
  const void* grad[2];
  void* g_x;
  void* g_att[2];
};

// out[i] = own * x[i] + sum_e w[e] f(x[col[e]], y[e]), where y[e] is the edge's row, or
// that times the map, and f is 0: relu(x + x_dst[i] + y), 1: x * y (without a map), 2: 1
// where 0 is positive, else 0. What stands per entry is in the caller's order.
// With `grad` its gradients instead: `g` groups by source then, `out` is that of x.
struct MessageArgs {
  Grouping g;
  int kind;
  const void* x;
  int64_t x_stride;
  const void* edge;  // contiguous [entries, features], or [entries, depth] with a map;
                     // nullptr: 0
  const void* map;   // contiguous [map_rows, features], or nullptr; f32 and f64 only
  int64_t depth, map_rows;  // one row more than depth: it is added as it is
  const void* w;     // [entries], or nullptr
  const void* x_dst;  // contiguous [rows, features] ([cols, features] with grad), or nullptr
  double own;        // 0, or rows are columns
  int64_t features;
  void* out;         // contiguous [rows, features]
  const void* grad;  // contiguous [cols, features], or nullptr: forward
  void* g_edge;      // [entries, features], or nullptr: not wanted
  void* g_map;       // [map_rows, features], with a map
};

// The messages under sum_relu, each in the caller's order: out[perm[e]] is that of entry e,
// or what it is before its ReLU. f32 and f64; neither w nor own.
struct MessageRowsArgs {
  MessageArgs message;  // its out is [entries, features]
  bool relu;
};

// Sums of gated messages: see kernels/gate.py for what is computed, and for what out[]
// holds. Only f32, f64 and int32 indices; what stands per edge is in the caller's order.
// Backward, g groups by source, out[] are the gradients of src[], and under softmax dst[]
// are the three terms that its gradient is made of.
struct GateArgs {
  Grouping g;
  int kind;
  bool backward;
  const void* src[2];  // [cols, features] ([rows, features] backward)
  int64_t src_stride[2];
  const void* dst[3];  // [rows, features] ([cols, features] backward)
  int64_t dst_stride[3];
  const void* edge;  // contiguous [entries, terms * features], or [entries, depth] with a
                     // map; nullptr: 0. As many terms as sources; film: none.
  const void* map;   // contiguous [map_rows, terms * features], or nullptr
  int64_t depth, map_rows;  // one row more than depth: it is added as it is
  const void* t;     // [features], under softmax
  double epsilon;    // under softmax
  int64_t features;
  void* out[4];      // contiguous [rows, features] each, or nullptr: not wanted
  const void* grad;  // contiguous [cols, features], not under softmax
  void* g_edge;      // as edge without a map, or nullptr: not wanted
  void* g_map;       // as the map, with one
};

}  // namespace gnnaccel
