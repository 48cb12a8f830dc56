// What Python sees: a segment to attach, then a backend over it.
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace py = pybind11;
using meshwright::Segment;
using meshwright::ShmBackend;

namespace {

// The classes of `transport_errors.py`; never let go of, since an exception may be translated until the interpreter ends.
struct Kinds {
  py::handle lost_peer, mismatch, wrong_length;
};
Kinds& kinds() {
  static Kinds found;
  return found;
}

void raise(py::handle kind, const char* text, const py::tuple& more = py::tuple()) {
  const py::object error = kind(text, *more);
  PyErr_SetObject(kind.ptr(), error.ptr());
}

// Python tells these apart by their class, and never by their words.
void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const meshwright::LostPeer& lost) {
    raise(kinds().lost_peer, lost.what(), py::make_tuple(lost.known_rank()));
  } catch (const meshwright::Mismatch& mismatch) {
    raise(kinds().mismatch, mismatch.what());
  } catch (const meshwright::WrongLength& wrong) {
    raise(kinds().wrong_length, wrong.what(), py::make_tuple(wrong.sent_bytes));
  }
}

}  // namespace

PYBIND11_MODULE(MESHWRIGHT_MODULE, m) {
  py::module_::import("torch.distributed");  // where the base class is known
  const py::module_ errors = py::module_::import("meshwright.comm.shm.transport_errors");
  kinds() = {errors.attr("PeerGoneError").cast<py::object>().release(), errors.attr("DisagreementError").cast<py::object>().release(),
             errors.attr("WrongLengthError").cast<py::object>().release()};
  py::register_exception_translator(&translate);

  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def(py::init<int, int, int, size_t, size_t, uint64_t, bool>(), py::arg("file"), py::arg("rank"), py::arg("num_ranks"),
           py::arg("slot_bytes"), py::arg("ring_bytes"), py::arg("nonce"), py::arg("create"));

  m.def("leave_all", &ShmBackend::leave_all);
  m.def("enter_call", &meshwright::enter_call, py::arg("call"), py::arg("outermost"));
  m.def("tell_raised", &ShmBackend::tell_raised, py::arg("call"));

  py::class_<ShmBackend, c10d::Backend, c10::intrusive_ptr<ShmBackend>>(m, "ShmBackend")
      .def(py::init([](std::shared_ptr<Segment> segment, std::vector<int64_t> global_ranks, std::vector<int> process_files,
                       int64_t timeout_ms, bool crowded) {
             const meshwright::Settings settings{std::move(global_ranks), std::move(process_files), timeout_ms, crowded};
             return ShmBackend::make(std::move(segment), settings);
           }),
           py::arg("segment"), py::arg("global_ranks"), py::arg("process_files"), py::arg("timeout_ms"), py::arg("crowded"))
      .def_property_readonly("options", &ShmBackend::getBackendOptions)
      .def("reduce_slices", &ShmBackend::reduce_slices, py::arg("tensors"), py::arg("ends"),
           py::call_guard<py::gil_scoped_release>());
}
