"""The gateway's pure core: the lane between worker and link, the WebSocket codec, home slots, stamp grants."""
