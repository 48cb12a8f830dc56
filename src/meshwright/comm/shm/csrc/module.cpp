// What Python sees: a segment to attach, then a backend over it.
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace py = pybind11;
using meshwright::Segment;
using meshwright::ShmBackend;

PYBIND11_MODULE(MESHWRIGHT_MODULE, m) {
  py::module_::import("torch.distributed");  // where the base class is known

  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def(py::init<int, int, int, size_t, size_t, uint64_t, bool>(), py::arg("file"), py::arg("rank"), py::arg("num_ranks"),
           py::arg("slot_bytes"), py::arg("ring_bytes"), py::arg("nonce"), py::arg("create"));

  m.def("leave_all", &ShmBackend::leave_all);
  m.def("enter_call", &meshwright::enter_call, py::arg("call"));
  m.def("tell_raised", &ShmBackend::tell_raised, py::arg("call"));

  py::class_<ShmBackend, c10d::Backend, c10::intrusive_ptr<ShmBackend>>(m, "ShmBackend")
      .def(py::init([](std::shared_ptr<Segment> segment, std::vector<int64_t> global_ranks, std::vector<int> process_files,
                       int64_t timeout_ms, bool crowded) {
             const meshwright::Settings settings{std::move(global_ranks), std::move(process_files), timeout_ms, crowded};
             return c10::make_intrusive<ShmBackend>(std::move(segment), settings);
           }),
           py::arg("segment"), py::arg("global_ranks"), py::arg("process_files"), py::arg("timeout_ms"), py::arg("crowded"))
      .def("reduce_slices", &ShmBackend::reduce_slices, py::arg("tensors"), py::arg("ends"),
           py::call_guard<py::gil_scoped_release>());
}
