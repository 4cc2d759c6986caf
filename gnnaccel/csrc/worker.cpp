#include "worker.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#endif

namespace gnnaccel {
namespace {

int64_t process() {
#if defined(__unix__) || defined(__APPLE__)
  return getpid();
#else
  return 0;
#endif
}

// Signals are for the main thread: one delivered here would not end its system calls,
// and Python would learn of Ctrl-C later. The new thread inherits the mask.
class SignalsBlocked {
 public:
#if defined(__unix__) || defined(__APPLE__)
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    // A fault of the thread itself must still end the process.
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
#endif
};

}  // namespace

// Shared by the thread, the worker and every ticket.
class Jobs {
 public:
  // In a forked child the thread is not there and the mutex may be held for ever, so
  // that nothing below may be touched.
  bool here() const { return owner_ == process(); }

  void start(std::shared_ptr<Jobs> self) {
    const SignalsBlocked blocked;
    thread_ = std::make_unique<std::thread>([self] { self->run(); });
  }

  uint64_t add(std::function<void()> job) {
    uint64_t number;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      number = ++last_;
      if (!stop_) {
        waiting_.emplace_back(number, std::make_shared<Job>(std::move(job)));
        state_.emplace(number, Entry{});
      }
    }
    wake_.notify_one();
    return number;
  }

  Ticket::State wait(uint64_t number, int64_t milliseconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (withdraw(number)) state_.erase(number);
    if (running_ == number) {
      auto job = job_;
      lock.unlock();
      (*job)();
      job = nullptr;
      lock.lock();
    }
    const auto settled = [&] {
      const auto entry = state_.find(number);
      return entry == state_.end() || entry->second.state != Ticket::State::kPending;
    };
    ended_.wait_for(lock, std::chrono::milliseconds(milliseconds), settled);
    const auto entry = state_.find(number);
    return entry == state_.end() ? Ticket::State::kLost : entry->second.state;
  }

  std::string error(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = state_.find(number);
    return entry == state_.end() ? std::string() : entry->second.error;
  }

  void drop(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    withdraw(number);
    ended_.wait(lock, [&] { return running_ != number; });
    state_.erase(number);
  }

  bool open() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !stop_;
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      for (const auto& job : waiting_) state_.erase(job.first);
      waiting_.clear();
    }
    wake_.notify_all();
    if (thread_ && thread_->joinable()) thread_->join();
    ended_.notify_all();
  }

 private:
  using Job = std::function<void()>;

  struct Entry {
    Ticket::State state = Ticket::State::kPending;
    std::string error;
  };

  // Whether the job was still waiting; it is not any more. Needs the lock.
  bool withdraw(uint64_t number) {
    for (auto job = waiting_.begin(); job != waiting_.end(); ++job) {
      if (job->first == number) {
        waiting_.erase(job);
        return true;
      }
    }
    return false;
  }

  void run() {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "gnnaccel-load");
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (stop_) return;
      uint64_t number;
      std::tie(number, job_) = std::move(waiting_.front());
      waiting_.pop_front();
      running_ = number;
      auto job = job_;
      lock.unlock();
      Entry outcome{Ticket::State::kDone, {}};
      try {
        (*job)();
      } catch (const std::exception& error) {
        outcome = {Ticket::State::kFailed, error.what()};
      } catch (...) {
        outcome = {Ticket::State::kFailed, "unknown error"};
      }
      lock.lock();
      running_ = 0;
      job_ = nullptr;
      const auto entry = state_.find(number);
      if (entry != state_.end()) entry->second = std::move(outcome);
      ended_.notify_all();
    }
  }

  const int64_t owner_ = process();
  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::deque<std::pair<uint64_t, std::shared_ptr<Job>>> waiting_;
  std::unordered_map<uint64_t, Entry> state_;
  std::unique_ptr<std::thread> thread_;
  uint64_t last_ = 0;
  uint64_t running_ = 0;
  std::shared_ptr<Job> job_;  // that which is running
  bool stop_ = false;
};

namespace {

// In a forked child the parent's queue is only left alone: its destructor would wait
// for a thread that is not there.
void leave(std::shared_ptr<Jobs>& jobs) {
  new std::shared_ptr<Jobs>(std::move(jobs));
}

}  // namespace

Ticket::~Ticket() {
  if (!jobs_) return;
  if (jobs_->here()) {
    jobs_->drop(number_);
  } else {
    leave(jobs_);
  }
}

Ticket::State Ticket::wait(int64_t milliseconds) const {
  return jobs_ && jobs_->here() ? jobs_->wait(number_, milliseconds) : State::kLost;
}

std::string Ticket::error() const {
  return jobs_ && jobs_->here() ? jobs_->error(number_) : std::string();
}

Worker::Worker() : jobs_(std::make_shared<Jobs>()) { jobs_->start(jobs_); }

Ticket Worker::submit(std::function<void()> job) {
  if (!alive()) return Ticket();
  return Ticket(jobs_, jobs_->add(std::move(job)));
}

bool Worker::alive() const { return jobs_ && jobs_->here() && jobs_->open(); }

void Worker::close() {
  if (!jobs_) return;
  if (!jobs_->here()) {
    leave(jobs_);
    jobs_.reset();
    return;
  }
  jobs_->stop();
}

}  // namespace gnnaccel
