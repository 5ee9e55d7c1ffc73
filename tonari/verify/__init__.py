"""`tonari verify`: whether a mesh trains what one process of plain torch trains."""
