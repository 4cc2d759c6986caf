// The part of the Python module that binds the background thread.
#pragma once
#include <nanobind/nanobind.h>

namespace gnnaccel {

void bind_worker(nanobind::module_& m);

}  // namespace gnnaccel
