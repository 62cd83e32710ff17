"""Value-tensor quantisation: the page format, the channel statistics and the calibration files."""

from hisparse.vtq.format import PageFormat
from hisparse.vtq.stats import ChannelStats, channel_order, estimate_stats

__all__ = ["ChannelStats", "PageFormat", "channel_order", "estimate_stats"]
