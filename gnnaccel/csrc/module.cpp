// Python bindings: addresses and sizes in, nothing owned. Callers (kernels/native.py)
// keep the tensors alive, have checked shapes and dtypes, and never pass untrusted
// values from here on.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "blocks.h"
#include "dispatch.h"
#include "group.h"
#include "module_worker.h"
#include "pack.h"
#include "parallel.h"
#include "pool.h"
#include "rows.h"

namespace nb = nanobind;
using namespace gnnaccel;

namespace {

using Address = uintptr_t;

template <class T = void>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

#define GROUPING_PARAMS                                                                   \
  Address ptr, Address col, Address perm, int64_t rows, int64_t entries, int64_t max_degree, \
      bool wide
#define GROUPING                                                                   \
  Grouping { at(ptr), at(col), at(perm), rows, entries, max_degree, wide }

void bind_spmm_sum(GROUPING_PARAMS, int dtype, Address x, int64_t x_stride, Address out,
                   int64_t heads, int64_t features, Address w, int64_t w_stride,
                   Address src_scale, Address dst_scale, Address self, int64_t self_stride,
                   Address base, double base_scale) {
  nb::gil_scoped_release release;
  kernels().spmm_sum({GROUPING, at(x), x_stride, at(out), heads, features, at(w), w_stride,
                      at(src_scale), at(dst_scale), at(self), self_stride, at(base), base_scale},
                     Dtype(dtype));
}

void bind_spmm_linear(GROUPING_PARAMS, Address x, int64_t x_stride, int64_t features,
                      Address w, Address src_scale, Address dst_scale, Address self,
                      int64_t self_stride, Address base, double base_scale, Address sums,
                      int64_t columns, Address map, Address root, Address bias, Address out,
                      bool adds, Address y, int64_t y_stride, Address g_map, Address g_root) {
  nb::gil_scoped_release release;
  const SumArgs sum{GROUPING, at(x), x_stride, at(sums), 1, features, at(w), 1,
                    at(src_scale), at(dst_scale), at(self), self_stride, at(base), base_scale};
  kernels().spmm_linear({sum, columns, at<float>(map), at<float>(root), at<float>(bias),
                         at<float>(out), adds, at<float>(y), y_stride, at<float>(g_map),
                         at<float>(g_root)});
}

void bind_spmm_extreme(GROUPING_PARAMS, int dtype, Address x, int64_t x_stride, Address out,
                       Address ties, int64_t features, Address w, bool is_max) {
  nb::gil_scoped_release release;
  kernels().spmm_extreme(
      {GROUPING, at(x), x_stride, at(out), at(ties), features, at(w), is_max}, Dtype(dtype));
}

void bind_spmm_select(GROUPING_PARAMS, int dtype, Address x, int64_t x_stride, Address best,
                      Address v, Address out, int64_t features, Address w, bool is_max,
                      bool transposed) {
  nb::gil_scoped_release release;
  kernels().spmm_select({GROUPING, at(x), x_stride, at(best), at(v), at(out), features, at(w),
                         is_max, transposed},
                        Dtype(dtype));
}

void bind_sddmm(GROUPING_PARAMS, int dtype, Address a, int64_t a_stride, Address b,
                int64_t b_stride, Address out, int64_t heads, int64_t features) {
  nb::gil_scoped_release release;
  kernels().sddmm({GROUPING, at(a), a_stride, at(b), b_stride, at(out), heads, features},
                  Dtype(dtype));
}

void bind_softmax(GROUPING_PARAMS, int dtype, Address z, Address grad, Address out,
                  int64_t heads, double epsilon) {
  nb::gil_scoped_release release;
  kernels().softmax({GROUPING, at(z), at(grad), at(out), heads, epsilon}, Dtype(dtype));
}

void bind_attention(GROUPING_PARAMS, int dtype, int score, int64_t heads, int64_t features,
                    Address query, Address key, Address value, Address att, Address edge,
                    Address bias, Address keep, double slope, double scale, double epsilon,
                    Address out, Address shares, Address map, int64_t depth, Address positive,
                    Address stats) {
  nb::gil_scoped_release release;
  AttentionArgs a{};
  a.g = GROUPING;
  a.score = score;
  a.heads = heads;
  a.features = features;
  a.query = at(query);
  a.key = at(key);
  a.value = at(value);
  a.att = at(att);
  a.edge = at(edge);
  a.bias = at(bias);
  a.keep = at(keep);
  a.slope = slope;
  a.scale = scale;
  a.epsilon = epsilon;
  a.out = at(out);
  a.shares = at(shares);
  a.map = at(map);
  a.depth = depth;
  a.positive = at(positive);
  a.stats = at(stats);
  kernels().attention(a, Dtype(dtype));
}

void bind_attention_backward(GROUPING_PARAMS, Address t_ptr, Address t_col, Address t_perm,
                             int64_t t_rows, int64_t t_entries, int64_t t_max_degree,
                             bool t_wide, Address positions, int dtype, int score,
                             int64_t heads, int64_t features, Address query, Address key,
                             Address value, Address att, Address edge, Address bias,
                             Address keep, double slope, double scale, Address out,
                             Address shares, Address grad, Address pair, Address g_query,
                             Address g_key, Address g_value, Address g_att, Address g_edge,
                             Address g_bias, Address map, int64_t depth, Address g_map,
                             Address positive, Address stats) {
  nb::gil_scoped_release release;
  const AttentionArgs a{GROUPING,
                        {at(t_ptr), at(t_col), at(t_perm), t_rows, t_entries, t_max_degree, t_wide},
                        at(positions), score, heads, features,
                        at(query), at(key), at(value), at(att), at(edge), at(bias), at(keep),
                        slope, scale, 0.0,
                        at(out), at(shares), at(grad), at(pair),
                        at(g_query), at(g_key), at(g_value), at(g_att), at(g_edge), at(g_bias),
                        at(map), depth, at(g_map), at(positive), at(stats)};
  kernels().attention_backward(a, Dtype(dtype));
}

void bind_head_dots(int dtype, int64_t rows, int64_t heads, int64_t features, Address x,
                    Address att, Address att2, Address out, Address out2, Address grad,
                    Address grad2, Address g_x, Address g_att, Address g_att2) {
  nb::gil_scoped_release release;
  kernels().head_dots({rows, heads, features, at(x), {at(att), at(att2)}, {at(out), at(out2)},
                       {at(grad), at(grad2)}, at(g_x), {at(g_att), at(g_att2)}},
                      Dtype(dtype));
}

void bind_message_rows(GROUPING_PARAMS, int dtype, Address x, int64_t x_stride, Address edge,
                       Address map, int64_t depth, int64_t map_rows, Address x_dst,
                       int64_t features, Address out, bool relu) {
  nb::gil_scoped_release release;
  const MessageArgs message{GROUPING, 0, at(x), x_stride, at(edge), at(map), depth, map_rows,
                            nullptr, at(x_dst), 0, features, at(out), nullptr, nullptr, nullptr};
  kernels().message_rows({message, relu}, Dtype(dtype));
}

void bind_message_sum(GROUPING_PARAMS, int dtype, int kind, Address x, int64_t x_stride,
                      Address edge, Address map, int64_t depth, int64_t map_rows, Address w,
                      Address x_dst, double own, int64_t features, Address out, Address grad,
                      Address g_edge, Address g_map) {
  nb::gil_scoped_release release;
  kernels().message_sum({GROUPING, kind, at(x), x_stride, at(edge), at(map), depth, map_rows,
                         at(w), at(x_dst), own, features, at(out), at(grad), at(g_edge), at(g_map)},
                        Dtype(dtype));
}

// Pairs of an address and a stride; strides are in elements.
void bind_gate_sum(GROUPING_PARAMS, int dtype, int kind, bool backward,
                   const std::vector<std::pair<Address, int64_t>>& src,
                   const std::vector<std::pair<Address, int64_t>>& dst, Address edge, Address map,
                   int64_t depth, int64_t map_rows, Address t, double epsilon, int64_t features,
                   const std::vector<Address>& out, Address grad, Address g_edge, Address g_map) {
  nb::gil_scoped_release release;
  GateArgs a{};
  a.g = GROUPING;
  a.kind = kind;
  a.backward = backward;
  for (size_t c = 0; c < src.size(); ++c) {
    a.src[c] = at(src[c].first);
    a.src_stride[c] = src[c].second;
  }
  for (size_t c = 0; c < dst.size(); ++c) {
    a.dst[c] = at(dst[c].first);
    a.dst_stride[c] = dst[c].second;
  }
  a.edge = at(edge);
  a.map = at(map);
  a.depth = depth;
  a.map_rows = map_rows;
  a.t = at(t);
  a.epsilon = epsilon;
  a.features = features;
  for (size_t c = 0; c < out.size(); ++c) a.out[c] = at(out[c]);
  a.grad = at(grad);
  a.g_edge = at(g_edge);
  a.g_map = at(g_map);
  kernels().gate_sum(a, Dtype(dtype));
}

double bind_read_rows(GROUPING_PARAMS, Address x, int64_t features) {
  nb::gil_scoped_release release;
  return kernels().read_rows(GROUPING, at<const float>(x), features);
}

// (bad_end, bad_value, sorted, loops, max_degree): see GroupResult.
nb::tuple bind_group(Address key, int64_t key_stride, Address other, int64_t other_stride,
                     bool wide_in, int64_t entries, int64_t rows, int64_t others,
                     Address origin_ptr, Address origin_perm, Address ptr, Address perm,
                     Address col, bool wide_out) {
  GroupResult r;
  {
    nb::gil_scoped_release release;
    r = group({{at(key), key_stride, wide_in},
               {at(other), other_stride, wide_in},
               entries, rows, others, at(origin_ptr), at(origin_perm), at(ptr), at(perm),
               at(col), wide_out});
  }
  return nb::make_tuple(r.bad_end, r.bad_value, r.sorted, r.loops, r.max_degree);
}

int64_t bind_gather_rows(Address index, int64_t index_stride, bool wide, int64_t entries,
                         int64_t rows, Address x, int64_t stride, int64_t bytes, Address out) {
  nb::gil_scoped_release release;
  return gather_rows(
      {{at(index), index_stride, wide}, entries, rows, at<const char>(x), stride, bytes, at<char>(out)});
}

// A tensor of bytes over a block of the pool, which gets it back when the tensor's
// storage dies; None if there is no memory.
nb::object bind_block(int64_t bytes) {
  void* block = pool_take(bytes);
  if (block == nullptr) return nb::none();
  nb::capsule owner(block, [](void* p) noexcept { pool_give(p); });
  return nb::cast(
      nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>>(block, {size_t(bytes)}, owner));
}

// Plans a batch: (offset of each part, rows of each row of the plan, sizes of both
// slabs), or where in `index` the first stands that is out of range.
nb::object bind_plan_batch(Address index, int64_t graphs, Address subset, int64_t n,
                           Address prefixes, int64_t rows, Address parts, int64_t count,
                           Address found, Address values) {
  const int64_t bad = look_up({at<const int64_t>(index), graphs, at<const int64_t>(subset), n,
                               at<const int64_t>(prefixes), rows, at<int64_t>(found),
                               at<int64_t>(values)});
  if (bad >= 0) return nb::cast(bad);
  std::vector<int64_t> offsets(count);
  int64_t sizes[2];
  place(at<const Part>(parts), count,
        {at<const int64_t>(found), at<const int64_t>(values), graphs}, offsets.data(), sizes);
  nb::list offset_list, totals;
  for (const int64_t offset : offsets) offset_list.append(offset);
  for (int64_t r = 0; r < rows; ++r) {
    totals.append(at<const int64_t>(values)[r * (graphs + 1) + graphs]);
  }
  return nb::make_tuple(offset_list, totals, sizes[0], sizes[1]);
}

void bind_fill_batch(Address parts, int64_t count, Address index, Address values,
                     int64_t graphs, Address slab, Address small, bool alone) {
  nb::gil_scoped_release release;
  fill_batch({at<const Part>(parts),
              count,
              {at<const int64_t>(index), at<const int64_t>(values), graphs},
              {at(slab), at(small)}},
             alone);
}

void bind_copy_blocks(Address blocks, int64_t count, Address target) {
  nb::gil_scoped_release release;
  copy_blocks(at<const Block>(blocks), count, at(target));
}

nb::tuple bind_pool_stats() {
  const PoolStats s = pool_stats();
  return nb::make_tuple(s.in_use, s.cached, s.peak, s.fresh, s.reused);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("set_pool", [](Address parallel_for, Address num_threads) {
    set_pool(at(parallel_for), at(num_threads));
  });
  m.def("threads", &threads);
  m.def("isa", [] { return kernels().isa; });
  m.def("use_isa", &use_isa);
  m.def("group", &bind_group);
  m.def("spmm_sum", &bind_spmm_sum);
  m.def("spmm_linear", &bind_spmm_linear);
  m.def("spmm_extreme", &bind_spmm_extreme);
  m.def("spmm_select", &bind_spmm_select);
  m.def("sddmm", &bind_sddmm);
  m.def("softmax", &bind_softmax);
  m.def("attention", &bind_attention);
  m.def("attention_backward", &bind_attention_backward);
  m.def("head_dots", &bind_head_dots);
  m.def("message_rows", &bind_message_rows);
  m.def("message_sum", &bind_message_sum);
  m.def("gate_sum", &bind_gate_sum);
  m.def("read_rows", &bind_read_rows);
  m.def("plan_batch", &bind_plan_batch);
  m.def("fill_batch", &bind_fill_batch);
  m.def("gather_rows", &bind_gather_rows);
  m.def("copy_blocks", &bind_copy_blocks);
  m.def("block", &bind_block);
  m.def("pool_stats", &bind_pool_stats);
  m.def("pool_limit", &pool_limit);
  m.def("pool_trim", &pool_trim);
  bind_worker(m);
}
