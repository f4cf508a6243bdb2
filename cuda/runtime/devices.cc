#include "runtime/devices.h"

#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace moe_a2a {
namespace {

// Never destroyed, because the thread of Listen() uses it until the process ends.
struct Registry {
  std::mutex mutex;
  std::map<int64_t, DevicePlace> devices;
  std::map<int, Endpoint> processes;
  std::set<int> ended;
};

Registry& registry() {
  static auto* all = new Registry();
  return *all;
}

template <typename Map, typename Key, typename Value>
bool Find(const Map& map, const Key& key, Value* value) {
  const auto it = map.find(key);
  if (it == map.end()) return false;
  *value = it->second;
  return true;
}

}  // namespace

void AddDevice(int64_t id, DevicePlace place) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().devices[id] = place;
}

void AddProcess(int process, Endpoint endpoint) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().processes[process] = std::move(endpoint);
  registry().ended.erase(process);
}

void SetEnded(int process) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().ended.insert(process);
}

bool HasEnded(int process) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().ended.count(process) != 0;
}

bool FindDevice(int64_t id, DevicePlace* place) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return Find(registry().devices, id, place);
}

bool FindOwnDevice(int ordinal, int64_t* id) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& [device, place] : registry().devices) {
    if (place.ordinal != ordinal) continue;
    *id = device;
    return true;
  }
  return false;
}

bool FindProcess(int process, Endpoint* endpoint) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return Find(registry().processes, process, endpoint);
}

}  // namespace moe_a2a
