// Stands in for cuda/runtime/devices.h: see workspace.h in this folder.
#pragma once
