// One background thread that runs jobs in order, so that a batch is copied while the
// last one is trained on. No Python runs on it and it never waits for the GIL.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace gnnaccel {

class Jobs;

// What was submitted. Dropping the last handle first takes the job back or, if it is
// running, waits for its end: memory that it writes may be freed right after.
class Ticket {
 public:
  Ticket() = default;
  Ticket(std::shared_ptr<Jobs> jobs, uint64_t number) : jobs_(std::move(jobs)), number_(number) {}
  Ticket(Ticket&&) = default;
  Ticket& operator=(Ticket&&) = delete;
  ~Ticket();

  enum class State { kPending, kDone, kFailed, kLost };

  // Takes the job back if it has not begun: who needs it now is faster than a thread
  // that has yet to wake up. Else helps with it, then waits up to `milliseconds` for
  // its end.
  //
  // kLost: the job will never run, since it was taken back or its thread was left
  // behind in the parent process by a fork.
  State wait(int64_t milliseconds) const;

  // What a failed job threw.
  std::string error() const;

 private:
  std::shared_ptr<Jobs> jobs_;
  uint64_t number_ = 0;
};

class Worker {
 public:
  // Starts the thread; throws std::system_error where the system refuses one.
  Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() { close(); }

  // The job may be called by a second thread while it runs: who waits for it helps.
  Ticket submit(std::function<void()> job);

  // False in a process that was forked from the one with the thread, and once closed.
  bool alive() const;

  // Drops the jobs that have not begun and joins the thread.
  void close();

 private:
  std::shared_ptr<Jobs> jobs_;
};

}  // namespace gnnaccel
