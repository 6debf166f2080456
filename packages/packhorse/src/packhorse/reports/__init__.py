"""What commands show: tables, plots and notes, and the padded side packing is compared with."""
