// Python's own lock.
#pragma once

#include <torch/csrc/python_headers.h>

namespace meshwright {

// The last reference may go in Python code, which holds the interpreter's lock; the threads that are about to end may need it.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

}  // namespace meshwright
