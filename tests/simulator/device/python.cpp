// The simulator's side of Python: findings become SimulatorError, and simulator.build compiles shaders.
#include <torch/csrc/utils/pybind.h>

#include <mutex>

#include "../metal/dispatch.h"
#include "../metal/runtime.h"

namespace py = pybind11;

namespace simulator {

void fail(const std::string& message) {
  py::gil_scoped_acquire gil;
  const py::object type = py::module_::import("simulator.errors").attr("SimulatorError");
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

std::string python_line() {
  py::gil_scoped_acquire gil;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const auto file = py::str(code.attr("co_filename")).cast<std::string>();
    // That of the caller, where Python calls an operator by torch.ops.
    if (!file.ends_with("/torch/_ops.py")) return file + ":" + std::to_string(PyFrame_GetLineNumber(raw));
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return "";
}

bool has_python() {
  return PyGILState_Check() != 0;
}

namespace {
std::mutex reports_mutex;
std::vector<std::string> reports;
}  // namespace

void report(const std::string& message) {
  std::lock_guard<std::mutex> lock(reports_mutex);
  reports.push_back(message);
}

std::string take_reports() {
  std::lock_guard<std::mutex> lock(reports_mutex);
  std::string text;
  for (const std::string& message : reports) text += (text.empty() ? "" : "\n") + message;
  reports.clear();
  return text;
}

std::string compile_shader(const std::string& source, std::string& error) {
  py::gil_scoped_acquire gil;
  const py::module_ build = py::module_::import("simulator.build");
  try {
    return py::str(build.attr("compile_shader")(source));
  } catch (py::error_already_set& raised) {
    if (!raised.matches(build.attr("ShaderError"))) throw;
    error = py::str(raised.value());
    return "";
  }
}

WaitForQueue::WaitForQueue() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
WaitForQueue::~WaitForQueue() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

}  // namespace simulator
