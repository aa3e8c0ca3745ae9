// Pages that not everybody may touch: whoever does faults, which is noted, and goes on.
#include <sys/mman.h>
#include <ucontext.h>

#include <array>
#include <csignal>
#include <utility>

#include "../metal/runtime.h"

namespace simulator {
namespace {

// Read by the handler of a signal. A fault is that of host code, which holds no lock of the simulator's.
std::array<std::atomic<Pages*>, 16384> all_pages;
std::atomic<size_t> end_of_pages = 0;
struct sigaction others;

void on_fault(int signal, siginfo_t* info, void* context) {
  constexpr greg_t kWrite = 2;
  const bool writes = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & kWrite;
  for (size_t i = 0; i < end_of_pages; ++i) {
    Pages* pages = all_pages[i];
    if (pages != nullptr && pages->note(static_cast<const char*>(info->si_addr), writes)) return;
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
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;  // not on the small stack that Python has for it
  sigaction(SIGSEGV, &ours, nullptr);
}

constexpr int kEverything = PROT_READ | PROT_WRITE;

}  // namespace

Pages::Pages(char* data, size_t size, Touched touched)
    : data_(data), size_(size), touched_(std::move(touched)), protection_(kEverything) {
  for (size_t i = 0; i < all_pages.size(); ++i) {
    Pages* none = nullptr;
    if (!all_pages[i].compare_exchange_strong(none, this)) continue;
    size_t end = end_of_pages;
    while (end < i + 1 && !end_of_pages.compare_exchange_weak(end, i + 1)) continue;
    return;
  }
  fail("the simulator has no place for the pages of one more buffer");
}

Pages::~Pages() {
  protect(kEverything);
  for (size_t i = 0; i < end_of_pages; ++i) {
    Pages* expected = this;
    if (all_pages[i].compare_exchange_strong(expected, nullptr)) return;
  }
}

void Pages::protect(int protection) {
  if (protection_ == protection && !is_opened_) return;
  if (protection != kEverything) catch_faults();
  protection_ = protection;
  is_opened_ = false;
  mprotect(data_, size_, protection);
}

void Pages::open(size_t page, int protection) {
  if (protection_ == kEverything) return;
  is_opened_ = true;
  mprotect(data_ + page * kPage, kPage, protection);
}

bool Pages::note(const char* address, bool writes) {
  if (address < data_ || address >= data_ + size_) return false;
  touched_(address, writes);
  return true;
}

Poison::Poison(char* data, size_t size)
    : pages_(data, size, [this](const char*, bool) {
        is_read_ = true;
        open();
      }) {}

void Poison::close() {
  pages_.protect(PROT_NONE);
}

void Poison::open() {
  pages_.protect(kEverything);
}

}  // namespace simulator
