// Memory that nobody may read yet: whoever does faults, which is noted, and goes on.
#include <sys/mman.h>

#include <array>
#include <csignal>

#include "../metal/runtime.h"

namespace simulator {
namespace {

// Read by the handler of a signal.
std::array<std::atomic<Poison*>, 4096> poisoned;
struct sigaction others;

void on_fault(int signal, siginfo_t* info, void* context) {
  for (std::atomic<Poison*>& each : poisoned) {
    Poison* poison = each;
    if (poison != nullptr && poison->note(static_cast<const char*>(info->si_addr))) return;
  }
  if (others.sa_flags & SA_SIGINFO) return others.sa_sigaction(signal, info, context);
  sigaction(signal, &others, nullptr);  // what faults again ends the process
}

void catch_faults() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) return;
  others = now;
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace

void Poison::close() {
  if (is_closed_) return;
  catch_faults();
  for (std::atomic<Poison*>& each : poisoned) {
    Poison* none = nullptr;
    if (!each.compare_exchange_strong(none, this)) continue;
    is_closed_ = true;
    mprotect(data_, size_, PROT_NONE);
    return;
  }
}

void Poison::open() {
  if (!is_closed_) return;
  mprotect(data_, size_, PROT_READ | PROT_WRITE);
  is_closed_ = false;
  for (std::atomic<Poison*>& each : poisoned) {
    Poison* expected = this;
    if (each.compare_exchange_strong(expected, nullptr)) return;
  }
}

bool Poison::note(const char* address) {
  if (address < data_ || address >= data_ + size_) return false;
  is_read_ = true;
  mprotect(data_, size_, PROT_READ | PROT_WRITE);
  return true;
}

}  // namespace simulator
