-- Health of PlatoCluster, GatewayPool and StateShard for Argo CD; one text for the three kinds.
-- Paused → Suspended. Else by the condition Ready, if it speaks of the generation that is applied. Stalled → Degraded.
local hs = {status = "Progressing", message = "the operator has said nothing of it yet"}

if obj.metadata.deletionTimestamp ~= nil then
  hs.message = "it is being deleted"
  return hs
end

local spec = obj.spec or {}
if spec.paused == true then
  hs.status = "Suspended"
  hs.message = "spec.paused is set"
  return hs
end
if spec.rollout ~= nil and spec.rollout.paused == true then
  hs.status = "Suspended"
  hs.message = "spec.rollout.paused is set"
  return hs
end

local status = obj.status
if status == nil or status.conditions == nil then
  return hs
end
if status.observedGeneration ~= obj.metadata.generation then
  hs.message = "the operator has not seen the newest spec yet"
  return hs
end

local found = {}
for _, condition in ipairs(status.conditions) do
  if condition.observedGeneration == nil or condition.observedGeneration == obj.metadata.generation then
    found[condition.type] = condition
  end
end

local function words(condition)
  return (condition.reason or "") .. ": " .. (condition.message or "")
end

local ready, stalled, reconciling = found.Ready, found.Stalled, found.Reconciling
if stalled ~= nil and stalled.status == "True" then
  hs.status = "Degraded"
  hs.message = words(stalled)
elseif ready == nil or ready.status == "Unknown" then
  hs.message = ready ~= nil and words(ready) or "Ready speaks of an older spec"
elseif ready.status == "True" then
  hs.status = "Healthy"
  hs.message = words(ready)
elseif reconciling ~= nil and reconciling.status == "True" then
  hs.message = words(ready)
else
  hs.status = "Degraded"
  hs.message = words(ready)
end
return hs
