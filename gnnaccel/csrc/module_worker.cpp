// Python bindings of the background thread; as in module.cpp, addresses come in and
// callers have checked them. What a job reads and writes is kept alive by its ticket.
#include "module_worker.h"

#include <nanobind/stl/string.h>

#include <memory>
#include <utility>

#include "pack.h"
#include "worker.h"

namespace nb = nanobind;

namespace gnnaccel {
namespace {

using Address = uintptr_t;

template <class T = void>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

// How long a wait lasts before it looks for Ctrl-C, in milliseconds.
constexpr int64_t kPatience = 50;

struct HeldTicket {
  // Destroyed in reverse order: the job has ended before its memory is let go.
  nb::object keep;
  Ticket ticket;
};

// True if the job is done, False if it never will be: the caller then does it.
bool wait(const HeldTicket& held) {
  while (true) {
    Ticket::State state;
    {
      nb::gil_scoped_release release;
      state = held.ticket.wait(kPatience);
    }
    if (state == Ticket::State::kDone) return true;
    if (state == Ticket::State::kLost) return false;
    if (state == Ticket::State::kFailed) throw std::runtime_error(held.ticket.error());
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

HeldTicket submit(Worker& worker, nb::object keep, Address parts, int64_t count, Address index,
                  Address values, int64_t graphs, Address slab, Address small) {
  auto filling = std::make_shared<Filling>(
      Fill{at<const Part>(parts),
           count,
           {at<const int64_t>(index), at<const int64_t>(values), graphs},
           {at(slab), at(small)}});
  return {std::move(keep), worker.submit([filling] { filling->run(); })};
}

}  // namespace

void bind_worker(nb::module_& m) {
  nb::class_<HeldTicket>(m, "Ticket").def("wait", &wait);
  nb::class_<Worker>(m, "Worker")
      .def(nb::init<>())
      .def("submit", &submit)
      .def("alive", &Worker::alive)
      .def("close", &Worker::close);
}

}  // namespace gnnaccel
