"""Engines that HiSparse plugs into."""
